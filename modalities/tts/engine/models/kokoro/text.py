"""What the phonemes say: an ALBERT over them for prosody, and a convolutional encoder for sound.

Owns both encoders of phoneme ids. Knows nothing of voices. ALBERT: arXiv:1909.11942.

Legend: B rows, T tokens, C hidden channels, E embedding size, H heads, D head size.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from triptych.modalities.tts.configs.kokoro import AlbertConfig, KokoroConfig
from triptych.modalities.tts.engine.models.kokoro.joints import Joints, gmacs

ALBERT_EPSILON = 1e-12


class AlbertEmbeddings(nn.Module):
    """Phoneme, position and (always the first) type embeddings, normalised."""

    def __init__(self, config: AlbertConfig, num_tokens: int) -> None:
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(num_tokens, size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=ALBERT_EPSILON)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] ids to [B, T, E]."""
        position_TE = self.position_embeddings.weight[: ids_BT.shape[1]]
        x_BTE = self.word_embeddings(ids_BT) + position_TE + self.token_type_embeddings.weight[0]
        return self.LayerNorm(x_BTE)  # type: ignore[no-any-return]


class AlbertAttention(nn.Module):
    """Self-attention with its residual and norm."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, size)
        self.value, self.dense = nn.Linear(size, size), nn.Linear(size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=ALBERT_EPSILON)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to the same."""
        q_BHTD, k_BHTD, v_BHTD = (
            project(x_BTC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD)
        return self.LayerNorm(x_BTC + self.dense(y_BHTD.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class AlbertLayer(nn.Module):
    """The one layer that ALBERT applies again and again."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.attention = AlbertAttention(config)
        self.ffn = nn.Linear(config.hidden_size, config.intermediate_size)
        self.ffn_output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.full_layer_layer_norm = nn.LayerNorm(config.hidden_size, eps=ALBERT_EPSILON)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to the same."""
        x_BTC = self.attention(x_BTC)
        y_BTC = self.ffn_output(F.gelu(self.ffn(x_BTC), approximate="tanh"))
        return self.full_layer_layer_norm(y_BTC + x_BTC)  # type: ignore[no-any-return]


class Albert(nn.Module):
    """The phoneme-level language model."""

    def __init__(self, config: AlbertConfig, num_tokens: int) -> None:
        super().__init__()
        self.num_layers = config.num_hidden_layers
        self.embeddings = AlbertEmbeddings(config, num_tokens)
        self.mapping = nn.Linear(config.embedding_size, config.hidden_size)
        self.layer = AlbertLayer(config)

    def forward(self, ids_BT: Tensor) -> Joints[Tensor]:
        """[B, T] ids to [B, T, C]."""
        x_BTC = self.mapping(self.embeddings(ids_BT))
        for _ in range(self.num_layers):
            yield gmacs(self.layer, ids_BT[:, None])
            x_BTC = self.layer(x_BTC)
        return x_BTC  # type: ignore[no-any-return]


class PhonemeEncoder(nn.Module):
    """Convolutions and an LSTM over phonemes: what is to be pronounced."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.kernel_size
        self.embedding = nn.Embedding(config.num_tokens, size)
        self.cnn = nn.ModuleList(
            nn.ModuleList((nn.Conv1d(size, size, kernel, padding=kernel // 2), nn.LayerNorm(size)))
            for _ in range(config.num_layers)
        )
        self.lstm = nn.LSTM(size, size // 2, batch_first=True, bidirectional=True)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] ids to [B, T, C]."""
        x_BTC = self.embedding(ids_BT)
        for block in self.cnn:
            convolve, norm = block.children()
            y_BCT = convolve(x_BTC.transpose(1, 2))
            x_BTC = F.leaky_relu(norm(y_BCT.transpose(1, 2)), 0.2)
        return self.lstm(x_BTC)[0]  # type: ignore[no-any-return]
