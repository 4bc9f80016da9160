"""Hugging Face checkpoints on disk: tensor names, safetensors, tokenizer."""
