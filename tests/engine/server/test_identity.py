"""The file's identity, as Ollama's clients are told it."""

import subprocess
from datetime import datetime

import httpx
from tests.engine.models import smollm2
from tests.engine.server.live import Started


def test_ollama_s_clients_see_the_file(smol: Started) -> None:
    """Who told the truth: sha256sum, stat, and the model's own card (135M, Q4_1)."""
    path = smollm2()
    digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
    (card,) = httpx.get(f"{smol.url}/api/tags", timeout=60).json()["models"]
    assert (card["digest"], card["size"]) == (digest.stdout.split()[0], path.stat().st_size)
    modified = datetime.fromisoformat(card["modified_at"]).timestamp()
    assert abs(modified - path.stat().st_mtime) < 0.001
    shown = httpx.post(f"{smol.url}/api/show", json={"model": card["name"]}).json()
    for details in (card["details"], shown["details"]):
        assert (details["family"], details["families"]) == ("llama", ["llama"])
        assert (details["parameter_size"], details["quantization_level"]) == ("134.52M", "Q4_1")
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["model_info"]["llama.embedding_length"] == 576
