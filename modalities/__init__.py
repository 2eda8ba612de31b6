"""One folder per modality. Siblings never import each other (vlm may import llm)."""
