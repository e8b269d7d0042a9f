"""A tokenizer without files: one token a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(*, bos: bool = False, chat: bool = False) -> PreTrainedTokenizerFast:
    """Printable ASCII and the line break, a token each, after ``<pad>`` 0, ``<eos>`` 1, ``<bos>`` 2 and ``<unk>`` 3.

    Args:
        bos: put ``<bos>`` before every text, as Llama's tokenizers do.
        chat: give it a plain chat template.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", *(chr(code) for code in range(32, 127))]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    inner.decoder = decoders.Fuse()  # type: ignore[assignment]
    if bos:
        inner.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<bos> $A", special_tokens=[("<bos>", tokens.index("<bos>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
