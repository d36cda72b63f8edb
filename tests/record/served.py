"""Writes the request log of known requests with SGLang's own logger.

python -m tests.record.served DIR [--level N]      (in an environment of experiments.diff)

DIR gets the files of `--log-requests --log-requests-format json --log-requests-target DIR`. After
half of the requests the log is rotated, as SGLang does every hour.
"""

import argparse
import logging
import sys
import time

from tests.record.traffic import requests


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--level", type=int, default=3)
    options = parser.parse_args()
    from experiments.diff.sglang import device  # noqa: F401 - before the package

    from sglang.srt.managers.io_struct import GenerateReqInput  # isort: skip
    from sglang.srt.utils.request_logger import RequestLogger

    logging.disable(logging.NOTSET)
    logger = RequestLogger(True, options.level, "json", [options.folder])  # noqa: FBT003
    every = requests()
    for place, (prompt, answer) in enumerate(every):
        if place == len(every) // 2:
            logger.targets[0].handlers[0].doRollover()
            time.sleep(0.01)  # the order of the files is that of their times
        asked = GenerateReqInput(input_ids=prompt, rid=f"r{place}")
        logger.log_received_request(asked)
        meta = {"prompt_tokens": len(prompt), "completion_tokens": len(answer), "e2e_latency": 0.25}
        logger.log_finished_request(
            asked, {"text": "a secret", "output_ids": answer, "meta_info": meta}
        )


if __name__ == "__main__":
    sys.exit(main())
