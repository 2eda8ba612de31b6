"""Configurations of the embedded vision family, as transformers' objects. Needs no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

MODEL_TYPE = "triptych_slots"


class SlotVisionConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of the slot encoder.

    - `kinds`: for each kind of slot, its number of classes and of soft tokens per class.
    - `fields`: the slots' kinds. After them comes a word of at most `num_letters` letters, one of
      `num_words` known ones.
    - `sentence`: the order of the soft tokens, as indices of fields (their count: the word), and
      -1 for constant soft tokens.
    - `hidden_size`: that of a patch tower with equally large activations, for reserving memory.
    """

    model_type = "triptych_slots_vision"

    image_size: int = 224
    hidden_size: int = 512
    reader_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_looks: int = 3
    kinds: dict[str, Any] | None = None
    fields: list[Any] | None = None
    sentence: list[Any] | None = None
    num_letters: int = 8
    num_words: int = 2000

    def __post_init__(self, **kwargs: Any) -> None:
        """Set fields that the configuration lacks to empty values."""
        self.kinds = self.kinds or {}
        self.fields, self.sentence = self.fields or [], self.sentence or []
        super().__post_init__(**kwargs)

    @property
    def num_positions(self) -> int:
        """The number of an image's soft tokens."""
        kinds, fields = self.kinds or {}, self.fields or []
        widths = [int(kinds[kind][1]) for kind in fields]
        sentence = self.sentence or []
        return sum(widths[part] if 0 <= part < len(widths) else 1 for part in sentence)


class SlotConfig(PreTrainedConfig):  # type: ignore[misc]
    """The whole model: the configurations of its language model and its vision encoder.

    `adapter_rank` and `adapter_alpha` configure the low-rank changes to the language model that
    come with the encoder (LoRA, arXiv:2106.09685); without a rank there are none.
    """

    model_type = MODEL_TYPE
    sub_configs: ClassVar[dict[str, Any]] = {
        "text_config": AutoConfig,
        "vision_config": SlotVisionConfig,
    }

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    image_token_id: int = 0
    adapter_rank: int = 0
    adapter_alpha: float = 16.0

    def __post_init__(self, **kwargs: Any) -> None:
        """Build both parts from their fields; transformers 5.17 leaves this to the subclass."""
        if not isinstance(self.text_config, PreTrainedConfig):
            fields = {"model_type": "llama", **(self.text_config or {})}
            self.text_config = AutoConfig.for_model(**fields)
        if not isinstance(self.vision_config, PreTrainedConfig):
            self.vision_config = SlotVisionConfig(**(self.vision_config or {}))
        super().__post_init__(**kwargs)
