# /// script
# dependencies = ["cohere==7.3.1"]
# ///
"""Cohere's Python package: vectors in several forms, documents in order."""

from __future__ import annotations

from checks import Server, run_checks
from cohere import ClientV2
from tasks import ANIMALS, SEA, nearest


def client(server: Server) -> ClientV2:
    """A client of the server's."""
    return ClientV2(api_key=server.key, base_url=server.url)


def vectors(server: Server, kind: str, texts: list[str]) -> list[list[float]]:
    """The vectors of texts of one type."""
    reply = client(server).embed(
        model=server.embedding_model, input_type=kind, texts=texts, embedding_types=["float"]
    )
    return reply.embeddings.float_ or []


def embed(server: Server) -> str:
    """Vectors of documents and of a question about them."""
    (query,) = vectors(server, "search_query", [SEA])
    return nearest(query, vectors(server, "search_document", ANIMALS))


def embedding_types(server: Server) -> str:
    """A bit for each number."""
    reply = client(server).embed(
        model=server.embedding_model,
        input_type="clustering",
        texts=ANIMALS,
        embedding_types=["float", "binary", "ubinary", "base64"],
    )
    found = reply.embeddings.model_dump()
    numbers, bits = found["float_"][0], found["ubinary"][0]
    assert 8 * len(bits) == len(numbers)
    assert [byte - 128 for byte in bits] == found["binary"][0]
    assert len(found["base64"]) == len(ANIMALS)
    return f"{len(bits)} bytes for {len(numbers)} numbers"


def rerank(server: Server) -> str:
    """Documents in order of how well they match."""
    reply = client(server).rerank(
        model=server.embedding_model, query=SEA, documents=ANIMALS, top_n=1
    )
    (best,) = reply.results
    assert "ocean" in ANIMALS[best.index]
    return ANIMALS[best.index]


def main() -> None:
    """Try each function."""
    run_checks("cohere", embed, embedding_types, rerank)


if __name__ == "__main__":
    main()
