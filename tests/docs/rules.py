"""The rule for every command in the docs: it is run, parsed, run elsewhere, or has a reason.

One row a command: a pattern that matches it whole, and one of four answers. A command without a
row fails the test; so does a row without a command.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Run it at the desk (a scratch copy of the repository with a tiny model, a script, a trace).

    Attributes:
        instead: what to run for it, where that is not the same; groups of the pattern as {1}.
        code: the exit code that it must have.
        shows: a pattern that the output must match.
    """

    instead: str | None = None
    code: int = 0
    shows: str = ""


@dataclass(frozen=True)
class Parsed:
    """Its own command line parser takes it, and it is not run: why."""

    why: str


@dataclass(frozen=True)
class Elsewhere:
    """Another test runs it, or a file that the continuous check runs: FILE or FILE::NAME.

    Attributes:
        place: the file, and the test in it.
        says: what of the command stands there.
    """

    place: str
    says: str = ""


@dataclass(frozen=True)
class NotHere:
    """It cannot run on any machine: why."""

    why: str


Answer = Run | Parsed | Elsewhere | NotHere

BOARD = "needs a Jetson Orin"
GPU = "needs a GPU and gigabytes of model"
NIX = "needs Nix, its store and the network"
MINUTES = "takes minutes; its flags are read by its own parser"
# The one real run of the benchmark: the smallest model and test that it takes.
SMALL = "-p 8 -n 8 -r 1 --no-check --no-cold-start --backend tinygrad:CPU"

HISTORY = "tests/benchmarks/judge/history/test_command.py"
CHECK = "tests/benchmarks/check/test_check.py"
DEMO = "tests/telemetry/test_prometheus.py"
EXPORTER = "tests/telemetry/orinexporter/test_cli.py"

RULES: list[tuple[str, Answer]] = [
    # README, CONTRIBUTING
    (r"\. \.venv/bin/activate", NotHere("changes the reader's own shell")),
    (
        r"make chat( MODEL=model\.gguf)?",
        Elsewhere("tests/engine/command/test_cli.py::test_questions_may_be_piped"),
    ),
    (
        r"make serve( SERVE_FLAGS='--alias smollm2')?",
        Elsewhere("tests/engine/server/test_process.py::test_killed_under_load_it_starts_again"),
    ),
    (r"make bench", Elsewhere(".ci/run", "make bench")),
    (r"make test", Elsewhere(".ci/run", "make test")),
    (
        r"make kernel K=gemv",
        Elsewhere("tests/tools/test_makefile.py::test_every_kernel_has_tests_of_its_own"),
    ),
    (
        r"make modules",
        Elsewhere("tests/tools/test_makefile.py::test_every_module_says_what_it_is_for"),
    ),
    (r"pytest tests/docs", Elsewhere("Makefile", "$(BIN)/pytest")),
    (r"make boot-menu", Elsewhere("Makefile", "$(BIN)/pytest tests/nixos/upgrade/boot_menu.py")),
    # docs/nixos.md
    (
        r"nix run \.#flash -- --dry-run orin-agx-devkit",
        Elsewhere(
            "tests/nixos/install/test_flash.py::test_a_dry_run_says_it_all_and_builds_nothing"
        ),
    ),
    (
        r"nix run \.#flash -- orin-agx-devkit",
        Elsewhere(
            "tests/nixos/install/test_flash.py::test_the_script_of_this_board_is_built_and_run"
        ),
    ),
    (
        r"nix build \.#installer",
        Elsewhere(
            "tests/nixos/test_flake.py::"
            "test_the_installer_and_the_flashing_scripts_have_derivations"
        ),
    ),
    (r"sudo dd if=result/iso/orin-installer\.iso .*", NotHere("writes a USB stick")),
    (
        r"ssh -t root@orin-installer\.local orin-install",
        Elsewhere(
            "tests/nixos/install/test_install.py::test_power_that_goes_at_any_step_costs_a_rerun"
        ),
    ),
    (
        r"ssh orin@orin-minimal\.local|scp model\.gguf orin@.*|ssh orin@orin\.local mv .*",
        NotHere(BOARD),
    ),
    (r"sudo nixos-rebuild .*|nix run /etc/nixos#llama-bench", NotHere(BOARD)),
    (
        r"systemctl status orin-performance-readback orin-gpu",
        Elsewhere(
            "tests/nixos/started/test_started_units.py::"
            "test_a_board_that_did_not_follow_is_a_failed_unit_with_its_reason"
        ),
    ),
    (
        r"curl localhost:8000/v1/chat/completions .*",
        Elsewhere(
            "tests/nixos/started/test_started_server.py::test_at_boot_it_comes_after_the_power_mode_and_is_up_when_it_answers"
        ),
    ),
    (r"nix build (--dry-run )?\.#nixosConfigurations.*", NotHere(NIX)),
    (r"nix run \.#[\w-]+( -- .*)?", NotHere(NIX)),
    (r"nix develop( \.#(tinygrad|llama-cpp))?|nix flake check|nixos-rebuild .*", NotHere(NIX)),
    (
        r"orinbench synth --shape 1b --quant Q6_K 1b\.gguf",
        Run("orinbench synth --shape tiny --quant Q6_K new.gguf", shows="synthetic tiny Q6_K"),
    ),
    (r"orinbench llama-bench -m 1b\.gguf .*", Parsed(GPU)),
    (r"tools/series checkout (/tmp/\w+)", Run("tools/series checkout {1}", shows=r"\d+ patches")),
    (
        r"git -C /tmp/tg commit -a --amend",
        Run("git -C /tmp/tg commit -a --amend --no-edit"),
    ),
    (r"tools/series export /tmp/tg", Run(shows="nothing changed")),
    (r"tools/series verify", Elsewhere("Makefile", "tools/series verify\n")),
    # docs/engine.md
    (
        r"orinllm run ((\.venv/)?SmolLM2-135M-Instruct\.Q4_1\.gguf|MODEL) -p .*",
        Elsewhere("tests/engine/command/test_cli.py::test_run_prints_the_answer_and_nothing_else"),
    ),
    (
        r"orinllm (run hf\.co/OWNER/REPO:Q4_K_M -p TEXT|list|rm NAME)",
        Elsewhere("tests/engine/file/test_hub.py::test_a_model_is_fetched_once_listed_and_removed"),
    ),
    (
        r"orinllm run \S+ --mmproj \S+ --image photo\.jpg .*",
        Elsewhere("tests/engine/vision/test_command.py::test_a_picture_of_the_command_line"),
    ),
    (r"llama-mtmd-cli .*", NotHere("llama.cpp's command, on real weights")),
    (
        r"orinllm chat MODEL",
        Elsewhere("tests/engine/command/test_cli.py::test_questions_may_be_piped"),
    ),
    (
        r"orinllm show MODEL",
        Elsewhere("tests/engine/command/test_cli.py::test_show_says_what_a_model_is"),
    ),
    (
        r"orinllm compile MODEL --arch sm_87 -o DIR",
        Elsewhere("tests/engine/gpu/test_ahead.py::test_a_start_with_cubins_compiles_nothing"),
    ),
    # docs/server.md
    (
        r"orinllm serve .*",
        Elsewhere("tests/engine/server/protocols/test_fields.py::test_an_answer_and_its_counts"),
    ),
    (
        r"curl http://127\.0\.0\.1:8000/v1/chat/completions .*",
        Elsewhere("tests/engine/server/test_clients.py::test_hosts_and_origins"),
    ),
    (
        r"python -m tests\.engine\.server\.batch_rounding .*",
        Elsewhere("tests/engine/server/test_rounding.py::test_only_near_ties_depend_on_others"),
    ),
    # docs/measure/llama-bench.md
    (
        r"orinbench llama-bench -m model\.gguf -o json > before\.json",
        Run(
            f"orinbench llama-bench -m model.gguf -o json {SMALL} > before.json"
            " && cp before.json after.json"
        ),
    ),
    (r"orinbench llama-bench -m model\.gguf( .*)?", Parsed(MINUTES)),
    (
        r"orinbench twin run\.json",
        Elsewhere(
            "tests/benchmarks/judge/test_twin.py::"
            "test_the_command_prints_a_prediction_with_its_interval"
        ),
    ),
    (r"orinbench compare before\.json after\.json", Run(shows="tg8")),
    # docs/measure/serve-bench.md
    (r"orinbench serve-bench .*", Elsewhere("tests/benchmarks/serve/test_serve_bench.py")),
    # docs/measure/benchmarks.md
    (r"orinbench suite --select 'alloc \* 4 KiB' --device CPU -r 1", Run(shows="driver 4 KiB")),
    (r"orinbench suite ?.*", Parsed(MINUTES)),
    # docs/measure/history.md
    (
        r"orinbench history( --test tg128 --device Orin)?",
        Elsewhere(f"{HISTORY}::test_a_slower_revision_stands_out"),
    ),
    (r"orinbench history (pin baseline 3|check)", Elsewhere(f"{HISTORY}::test_pins")),
    (r"orinbench history (import|show) .*", Elsewhere(f"{HISTORY}::test_import_and_show")),
    (
        r"orinbench compare (3|before\.json) 5",
        Elsewhere(
            "tests/benchmarks/judge/history/test_compare.py"
            "::test_runs_of_the_history_are_named_by_their_ids"
        ),
    ),
    # docs/measure/device-check.md
    (
        r"orinbench device-check verify device-check/report\.json",
        Elsewhere(
            "tests/benchmarks/check/device/test_claims.py"
            "::test_verify_prints_the_claims_and_says_by_its_code_whether_one_is_refuted"
        ),
    ),
    (r"orinbench device-check", Run(code=2, shows="no Orin's GPU here")),
    # docs/measure/history.md, the report
    (
        r"orinbench report before\.json .*",
        Elsewhere(
            "tests/benchmarks/show/test_command.py::test_files_and_runs_become_a_page",
            says='"--title"',
        ),
    ),
    # docs/reference/figures.md, docs/models.md, docs/measure/performance.md
    (
        r"orinbench synth --shape tiny\|160m.*",
        Run("orinbench synth --shape tiny --quant Q6_K --seed 0 --force OUT.gguf"),
    ),
    (
        r"orinbench check -m MODEL\.gguf .*",
        Elsewhere(f"{CHECK}::test_the_command_prints_a_line_for_each_engine"),
    ),
    (
        r"pip download .*|tar xf llama.*|cmake .*|export PATH=\$PWD/build/bin:\$PATH",
        NotHere("builds llama.cpp: five minutes of two cores and the network"),
    ),
    # docs/simulator*.md, tegra-iface.md
    (
        r"DEV=NV nvgpusim -- (python3 -c .*)",
        Run("DEV=NV nvgpusim -- {1}", shows=r"\[2\.0, 3\.0\]"),
    ),
    (
        r"(python -m nvgpusim\.|nvgpusim )programs kernels\.cubin kernels\.ptx",
        Elsewhere("tests/simulator/gpu/test_programs.py::test_command"),
    ),
    (
        r"nvgpusim judge answers\.json\.gz",
        Elsewhere("tests/simulator/kernel/test_judge.py::test_command"),
    ),
    (r"python -m nvgpusim -- python3 script\.py", Run(shows="rules  ")),
    (
        r"(python -m nvgpusim|nvgpusim) --place (\w+) (.*) -- pytest (\S+)",
        Run("{1} --place {2} {3} -- pytest -p no:cacheprovider {4}", shows="1 passed"),
    ),
    (r"python -m nvgpusim --delay 5 --poison --strict -- -m package\.module", Run(shows="rules  ")),
    (r"nvgpusim report", Run(shows="never  ")),
    (r"nvgpusim replay trace\.jsonl", Run()),
    (
        r"nvgpusim recorder recorder\.pyz( && scp recorder\.pyz board:)?",
        Run("nvgpusim recorder recorder.pyz", shows="copy it to the board"),
    ),
    (
        r"(CUDA_PATH=\S+ )?nvgpusim cuda .*\./program.*|nvcc -cudart shared .* program\.cu",
        Elsewhere("tests/simulator/cuda/test_cuda.py::test_a_dozen_programs_run_unchanged"),
    ),
    (
        r"pip install 'nvgpusim\[cuda,compiler\] @ \./simulator'",
        Elsewhere("tests/simulator/cuda/test_tools.py::test_a_wheel_of_its_own"),
    ),
    (
        r"nvgpusim run \w+\.cu( 1000)?",
        Elsewhere("tests/simulator/cuda/test_tools.py::test_run_compiles_runs_and_reports"),
    ),
    (
        r"python -m tests\.simulator\.cuda\.hecbench HeCBench",
        NotHere("needs a checkout of HeCBench, of which nothing is kept here"),
    ),
    (r"nvgpusim rules", Run(shows="profile\\.read-all-sm")),
    (r"python3 recorder\.pyz -o trace\.jsonl -- script\.py", NotHere(BOARD)),
    (r"python3 -c \"from tinygrad import Tensor;.*", Run(shows=re.escape("[2.0, 2.0, 2.0, 2.0]"))),
    # docs/life-of-a-tensor.md, environment.md, patches/README.md
    (r"make \.venv/\.dev", Elsewhere("Makefile", "\n.venv/.dev:")),
    (r"eval .*docs/examples/env\.py\)\"", Elsewhere("tests/docs/conftest.py", '"env.py"')),
    (r"export NO_COLOR=1", Run()),
    (
        r"tools/environment_variables\.py --check docs/reference/environment\.md",
        Elsewhere("tests/docs/test_environment.py", "page_differences(tool.merge_uses("),
    ),
    (
        r"tools/environment_variables\.py -o json PATH/TO/tinygrad",
        Run("tools/environment_variables.py -o json tools", shows="SERIES_OUTCOMES"),
    ),
    (r"tools/series status", Run(shows="0001  nv: TegraIface")),
    (r"tools/series verify 0002", Elsewhere("Makefile", "tools/series verify\n")),
    (
        r"tools/series verify --forward (0\.14\.0|DIR@REF)",
        Elsewhere("tests/tools/test_series_verify.py", '"--forward"'),
    ),
    (r"cd /tmp/port && git checkout -b new base && git rm -qr \.", Run()),
    (
        r"tar xf \.\./tinygrad-0\.14\.0\.tar\.gz --strip-components=1",
        Run("cd /tmp/port && git checkout base -- . && echo changed >> README.md"),
    ),
    (r"git (add|cherry-pick|tag) .*", Run("cd /tmp/port && {0}")),
    # docs/telemetry.md
    (
        r"make telemetry-demo",
        Elsewhere(f"{DEMO}::test_the_demonstration_shows_a_board"),
    ),
    (r"jetson-exporter", Elsewhere(f"{EXPORTER}::test_it_says_which_board_it_serves")),
    (r"jetson-exporter --once", Run(shows="# EOF|# TYPE")),
    (
        r"jetson-exporter top",
        Elsewhere("tests/telemetry/orinexporter/test_top.py::test_a_loaded_board"),
    ),
    (r"jetson-exporter record DIR", Elsewhere(f"{EXPORTER}::test_record_then_replay")),
    (r"jetson-exporter --replay DIR", Elsewhere(f"{EXPORTER}::test_record_then_replay")),
]

# Blocks without a language that hold no command: what they are, by page and first line.
NO_COMMANDS: dict[tuple[str, str], str] = {
    ("docs/nixos.md", "# systemctl stop grafana"): "root's; test_started_operations.py restores so",
    ("docs/server.md", "rate(orinllm_energy"): "queries for Prometheus",
    ("docs/nixos.md", "extra-substituters ="): "nix.conf",
    ("docs/simulator.md", "--inject ENOMEM@"): "flags; tests/simulator/kernel tries each form",
    ("docs/simulator-cuda.md", "nvgpusim: note: kernel _Z5saxpy"): "a finding",
    ("docs/telemetry.md", "jetson_energy_joules_total"): "PromQL",
}


def rule(command: str) -> tuple[str, Answer, re.Match[str]] | None:
    """The first row that matches a command whole."""
    for pattern, answer in RULES:
        if match := re.fullmatch(pattern, command, flags=re.DOTALL):
            return pattern, answer, match
    return None
