"""datatrove's own JsonlReader and DocumentTokenizer, without its shuffle.

    python datatrove_tokens.py DATA TOKENIZER OUT WORKERS

Prints the number of tokens.
"""

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main(data: str, tokenizer_json: str, out: str, workers: str) -> None:
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(data, glob_pattern="*.jsonl.zst"),
            DocumentTokenizer(
                f"{out}/tokens",
                tokenizer_json,
                eos_token="<|endoftext|>",
                shuffle_documents=False,
                batch_size=1000,
            ),
        ],
        tasks=int(workers),
        workers=int(workers),
        logging_dir=f"{out}/logs",
    ).run()
    sizes = (path.stat().st_size for path in Path(out, "tokens").rglob("*.ds"))
    sys.stdout.write(f"{sum(sizes) // 2}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
