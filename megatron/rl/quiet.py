"""Keeps libraries from talking over the program."""

import logging
import warnings


def quiet_libraries() -> None:
    """Libraries warn of missing packages and of calls that they make themselves; our start-up says what is used.

    Call it before they are imported.
    """
    warnings.filterwarnings("ignore", module=r"(megatron\.(core|training)|torch\.distributed)\b")
    for name in ("megatron.core", "megatron.training", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request
