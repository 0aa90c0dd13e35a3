"""The least that `tokenizers` can be asked to do: read, encode in batches, write.

    python plain_tokenizers.py DATA TOKENIZER OUT WORKERS

Prints the number of tokens.
"""

import io
import os
import sys
from pathlib import Path

import numpy as np
import orjson
import zstandard
from tokenizers import Tokenizer

BATCH_DOCUMENTS = 1000


def main(data: str, tokenizer_json: str, out: str, workers: str) -> None:
    os.environ["RAYON_NUM_THREADS"] = workers
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers != "1" else "false"
    tokenizer = Tokenizer.from_file(tokenizer_json)
    tokenizer.encode_special_tokens = True
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    num_tokens = 0
    for path in sorted(Path(data).glob("*.jsonl.zst")):
        with (
            zstandard.open(path, "rb") as lines,
            (Path(out) / f"{path.name}.bin").open("wb") as target,
        ):
            texts: list[str] = []
            for line in io.BufferedReader(lines, 1 << 20):
                texts.append(orjson.loads(line)["text"])
                if len(texts) == BATCH_DOCUMENTS:
                    num_tokens += write(texts, tokenizer, end_of_text, target)
                    texts = []
            num_tokens += write(texts, tokenizer, end_of_text, target)
    sys.stdout.write(f"{num_tokens}\n")


def write(
    texts: list[str], tokenizer: Tokenizer, end_of_text: int, target: io.BufferedIOBase
) -> int:
    num_tokens = 0
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids = np.array([*encoding.ids, end_of_text], np.uint16)
        target.write(ids.tobytes())
        num_tokens += len(ids)
    return num_tokens


if __name__ == "__main__":
    main(*sys.argv[1:])
