"""One folder per modality. Only `vlm` and `embedding` import another modality: `llm`."""
