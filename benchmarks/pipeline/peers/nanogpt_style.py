"""As nanoGPT's prepare.py does it: Hugging Face datasets, tiktoken, one memory-mapped file.

    python nanogpt_style.py DATA TOKENIZER OUT WORKERS

The ranks of tiktoken come from the tokenizer.json, for GPT-2's pattern. Prints the number of
tokens.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tiktoken
from datasets import load_dataset

GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
LARGEST_NUM_BATCHES = 1024


def load(tokenizer_json: str) -> tiktoken.Encoding:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(0x100 + n): byte for n, byte in enumerate(others)}
    vocab = json.loads(Path(tokenizer_json).read_text(encoding="utf-8"))["model"]["vocab"]
    end_of_text = vocab.pop("<|endoftext|>")
    ranks = {bytes(byte_of[symbol] for symbol in token): rank for token, rank in vocab.items()}
    return tiktoken.Encoding(
        "gpt2 of the file",
        pat_str=GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": end_of_text},
    )


def main(data: str, tokenizer_json: str, out: str, workers: str) -> None:
    encoding = load(tokenizer_json)

    def process(example: dict[str, str]) -> dict[str, object]:
        ids = encoding.encode_ordinary(example["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    files = sorted(map(str, Path(data).glob("*.jsonl.zst")))
    read = load_dataset("json", data_files=files, cache_dir=f"{out}/cache", split="train")
    done = read.map(process, remove_columns=read.column_names, num_proc=int(workers))
    num_tokens = int(np.sum(done["len"], dtype=np.uint64))
    target = np.memmap(f"{out}/train.bin", np.uint16, "w+", shape=(num_tokens,))
    place = 0
    num_batches = min(LARGEST_NUM_BATCHES, len(done))
    for index in range(num_batches):
        batch = done.shard(num_batches, index, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        target[place : place + len(ids)] = ids
        place += len(ids)
    target.flush()
    sys.stdout.write(f"{num_tokens}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
