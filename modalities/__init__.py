"""One folder per modality. `vlm` and `embedding` build on `llm`; no others import each other."""
