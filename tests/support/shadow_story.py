"""What the shadow model says after any text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from triptych.core.engine_api.tokens import TokenRequest

VOCAB_SIZE = 50


@dataclass
class ExpectedTokens:
    """All a job's tokens, and the shadow cache at each position; computed as far as asked.

    A position's digest covers who may share and every token up to it; the token that follows is a
    function of the digest.
    """

    request: TokenRequest
    token_ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def extend(self, num_tokens: int) -> None:
        """Go on until `num_tokens` positions are known, and the token that follows them."""
        request = self.request
        owner = f"{len(request.tenant)}:{request.tenant}{request.adapter}".encode()
        for position in range(len(self.digests), num_tokens):
            if position < len(request.prompt_ids):
                token_id = request.prompt_ids[position]
            else:
                token_id = self.digests[-1][0] % VOCAB_SIZE
            self.token_ids.append(token_id)
            parent = self.digests[-1] if self.digests else owner
            content = parent + token_id.to_bytes(8, "little")
            self.digests.append(hashlib.blake2b(content, digest_size=12).digest())

    def sampled_after(self, num_tokens: int) -> int:
        """The token that the shadow model samples at position `num_tokens`."""
        self.extend(num_tokens)
        return self.digests[num_tokens - 1][0] % VOCAB_SIZE
