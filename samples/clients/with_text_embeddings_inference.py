# /// script
# dependencies = [
#     "huggingface-hub==2.4.0",
#     "numpy==2.4.6",
#     "llama-index-embeddings-text-embeddings-inference==0.6.0",
#     "llama-index-postprocessor-tei-rerank==0.6.0",
# ]
# ///
"""Clients of Text Embeddings Inference: of the Hugging Face hub, and LlamaIndex's."""

from __future__ import annotations

from checks import Server, run_checks
from huggingface_hub import InferenceClient
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from tasks import ANIMALS, SEA, nearest


def feature_extraction(server: Server) -> str:
    """The hub's client: vectors."""
    client = InferenceClient(model=f"{server.url}/embed", token=server.key)
    query, *documents = (
        client.feature_extraction(text, normalize=True, truncate=True).ravel().tolist()
        for text in (SEA, *ANIMALS)
    )
    return nearest(query, documents)


def sentence_similarity(server: Server) -> str:
    """The hub's client: one sentence compared with others."""
    client = InferenceClient(model=f"{server.url}/similarity", token=server.key)
    scores = client.sentence_similarity(SEA, other_sentences=ANIMALS)
    found = ANIMALS[scores.index(max(scores))]
    assert "ocean" in found
    return found


def embeddings(server: Server) -> str:
    """LlamaIndex: vectors of texts."""
    model = TextEmbeddingsInference(
        model_name=server.embedding_model, base_url=server.url, auth_token=server.key
    )
    return nearest(model.get_query_embedding(SEA), model.get_text_embedding_batch(ANIMALS))


def rerank(server: Server) -> str:
    """LlamaIndex: documents in order."""
    ranker = TextEmbeddingInference(base_url=server.url, top_n=1, auth_token=f"Bearer {server.key}")
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in ANIMALS]
    (best,) = ranker.postprocess_nodes(nodes, query_bundle=QueryBundle(SEA))
    assert "ocean" in best.text
    return best.text


def main() -> None:
    """Try each function."""
    run_checks("huggingface-hub", feature_extraction, sentence_similarity, embeddings, rerank)


if __name__ == "__main__":
    main()
