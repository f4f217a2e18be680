"""Writes a Llama of 4 M random parameters with a tokenizer, for servers to be compared on: `tiny_llama.py DIR`."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from lamina.engine.text import load_codec
from lamina.models.tiny import write_tiny


def main(directory: Path) -> None:
    """Writes the checkpoint."""
    with TemporaryDirectory() as folder:
        write_tiny(Path(folder), shape="bench", file_format="transformers")
        codec = load_codec(folder)
        assert codec is not None
        config = transformers.LlamaConfig(
            vocab_size=codec.vocab_size, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=32768, tie_word_embeddings=False, bos_token_id=0,
            eos_token_id=1, pad_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes((Path(folder) / name).read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
