"""As Megatron-LM's and GPT-NeoX's preprocess_data.py do it: a pool that encodes document by
document with `tokenizers`, one process that writes the .bin and the lengths of the .idx.

    python megatron_style.py DATA TOKENIZER OUT WORKERS

Prints the number of tokens.
"""

import io
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard
from tokenizers import Tokenizer

CHUNK_DOCUMENTS = 25

tokenizer: Tokenizer
end_of_text: int


def begin(tokenizer_json: str) -> None:
    global tokenizer, end_of_text
    tokenizer = Tokenizer.from_file(tokenizer_json)
    tokenizer.encode_special_tokens = True
    end_of_text = tokenizer.token_to_id("<|endoftext|>")


def encode(line: bytes) -> list[int]:
    text = json.loads(line)["text"]
    return [*tokenizer.encode(text, add_special_tokens=False).ids, end_of_text]


def lines(data: str) -> Iterator[bytes]:
    for path in sorted(Path(data).glob("*.jsonl.zst")):
        with zstandard.open(path, "rb") as file:
            yield from io.BufferedReader(file, 1 << 20)


def main(data: str, tokenizer_json: str, out: str, workers: str) -> None:
    lengths: list[int] = []
    with (
        multiprocessing.Pool(int(workers), initializer=begin, initargs=(tokenizer_json,)) as pool,
        Path(out, "text_document.bin").open("wb") as target,
    ):
        for ids in pool.imap(encode, lines(data), CHUNK_DOCUMENTS):
            target.write(np.array(ids, np.uint16).tobytes())
            lengths.append(len(ids))
        pool.close()
        pool.join()
    Path(out, "text_document.idx").write_bytes(np.array(lengths, np.int32).tobytes())
    sys.stdout.write(f"{sum(lengths)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
