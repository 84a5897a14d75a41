"""Every snippet of the guides, of README.md and of the FAQ that this library began with runs on gloo ranks.

A page says before each block how it is run, in a comment that readers do not see:

    <!-- run: ranks=2 setup=transformer -->      names of a set-up below are there, and nothing else
    <!-- run: continue -->                       goes on where the page's previous block ended
    <!-- run: ranks=2 setup=lora bfloat16 -->    compared with the plain model at that precision

After its blocks a program's model takes one more step, compared with one process and plain PyTorch.
"""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.selection import clean_name
from tests.distributed.guide_models import SETUPS, Setup
from tests.distributed.pool import RankPool

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"<!-- run: (.+) -->\n\Z")
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")

# Snippets of the FAQ that this library began with, to the letter. (It says the second one in a sentence.)
FAQ_ACTION_HEAD = """\
import dmuon

dmuon.dedicate_params(
    model,
    mesh,
    predicate=lambda n, p: "proj" in n,
    hook_boundary_predicate=lambda m: hasattr(m, "_is_action_layer"),
    hook_boundary_strict=True,
)
"""
FAQ_HSDP = """\
dmuon.dedicate_params(model, mesh, replicate_mesh=hsdp["replicate"])
fully_shard(model, mesh=hsdp)
optimizer = dmuon.Muon(model, replicate_async=True)
"""
FAQ_TENSOR_PARALLEL = """\
from torch.distributed.tensor.parallel import parallelize_module
import dmuon
from torch.distributed.fsdp import fully_shard

for layer in model.layers:
    parallelize_module(layer.mlp, tp_mesh, {...})   # TP first

dmuon.dedicate_params(model, dp_mesh, ...)          # DMuon second

for layer in model.layers:
    fully_shard(layer, mesh=dp_mesh)                # FSDP2 third
fully_shard(model, mesh=dp_mesh)
"""


@dataclass
class Program:
    """Blocks of one page that share their names, as (first line, source), and how to run them."""

    page: str
    num_ranks: int
    setup: str
    flags: frozenset[str] = frozenset()
    blocks: list[tuple[int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}:{self.blocks[0][0]}"


def programs_of(path: Path) -> Iterator[Program]:
    text, program = path.read_text(), None
    for fence in FENCE.finditer(text):
        where = f"{path.name}:{text.count(chr(10), 0, fence.start()) + 1}"
        assert fence[1] == "python", f"{where}: only python blocks, all of which run"
        run = RUN.search(text, 0, fence.start())
        assert run, f"{where}: no <!-- run: ... --> before the block"
        words = run[1].split()
        options = dict(word.split("=") for word in words if "=" in word)
        if words == ["continue"]:
            assert program is not None, f"{where}: nothing to continue"
        else:
            if program is not None:
                yield program
            flags = frozenset(word for word in words if "=" not in word)
            assert options.keys() == {"ranks", "setup"}, f"{where}: {run[1]}"
            assert flags <= {"bfloat16"}, f"{where}: {run[1]}"
            program = Program(path.name, int(options["ranks"]), options["setup"], flags)
        program.blocks.append((text.count("\n", 0, fence.start(2)), fence[2]))
    if program is not None:
        yield program


def readme() -> list[Program]:
    """README.md is read outside of these pages too: it carries no comments."""
    sources = [source for language, source in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    assert sources
    return [Program("README.md", 2, "transformer", blocks=[(index, source)]) for index, source in enumerate(sources)]


PROGRAMS = [*(program for path in GUIDES for program in programs_of(path)), *readme()]
PROGRAMS += [
    Program("FAQ: action head", 2, "action", blocks=[(0, FAQ_ACTION_HEAD)]),
    Program("FAQ: HSDP", 4, "hsdp", blocks=[(0, FAQ_HSDP)]),
    # The FAQ leaves out the plan and the predicate: the one is the set-up's, the other the default.
    Program(
        "FAQ: order of parallelisms",
        4,
        "tensor_parallel",
        blocks=[(0, FAQ_TENSOR_PARALLEL.replace("{...}", "mlp_plan").replace(", ...)", ")"))],
    ),
]


def run(program: Program, folder: str) -> None:
    """On each rank: the blocks of a program, then a step of what they built."""
    setup = SETUPS[program.setup]
    names = setup.names()
    plain = copy.deepcopy(names["model"])
    before, names["folder"] = os.getcwd(), folder
    os.chdir(folder)
    try:
        for first_line, source in program.blocks:
            exec(compile("\n" * first_line + source, program.page, "exec"), names)
        take_a_step(setup, names, plain, tolerance=0.05 if "bfloat16" in program.flags else 1e-4)
    finally:
        os.chdir(before)
        dmuon.set_deterministic(False)


def take_a_step(setup: Setup, names: dict[str, Any], plain: nn.Module, tolerance: float) -> None:
    """One more step of the model that the snippets left, against the plain one with the same weights."""
    model = names["model"]
    assert dmuon.dedicated_params(model)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        fully_shard(model, mesh=names["fsdp_mesh"])
    optimizer = names["optimizer"] if "optimizer" in names else dmuon.Muon(model, lr=1e-2)
    optimizer.zero_grad()
    before = whole_weights(model, setup.tp_degree)
    inputs, targets = setup.batch(999, setup.data_parallel_index)
    loss = setup.loss_fn(model(inputs), targets)
    loss.backward()
    norm = dmuon.clip_grad_norm_(model, None)
    optimizer.step()
    after = whole_weights(model, setup.tp_degree)

    plain.load_state_dict(before)  # the names must be the model's own
    trainable = {clean_name(name) for name, param in model.named_parameters() if param.requires_grad}
    for name, param in plain.named_parameters():
        param.requires_grad_(name in trainable)
    num_batches = dist.get_world_size() // setup.tp_degree
    expected = torch.zeros(())
    for index in range(num_batches):
        inputs, targets = setup.batch(999, index)
        expected = expected + setup.loss_fn(plain(inputs), targets) / num_batches
    expected.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, expected.detach(), rtol=tolerance, atol=0)
    grads = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    expected_norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    torch.testing.assert_close(norm, expected_norm, rtol=tolerance, atol=0)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) != (name in grads), f"{name} moved, or did not"


def whole_weights(model: nn.Module, tp_degree: int) -> dict[str, Tensor]:
    """Every parameter whole, on every rank; a dedicated one comes from its owner, which is `tp_degree` ranks."""
    dedicated = {clean_name(n) for n, param in model.named_parameters() if param in dmuon.dedicated_params(model)}
    held = dmuon.get_state_dict(model)["model"]
    whole = {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in held.items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {name: whole[name] for name in dedicated & whole.keys()})
    for name in sorted(dedicated):
        values = [owned[name] for owned in of_ranks if name in owned]
        assert len(values) == tp_degree, f"{len(values)} ranks hold {name}"
        assert all(torch.equal(value, values[0]) for value in values), name
        whole[name] = values[0]
    return whole


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_snippets_run_and_their_model_trains(
    ranks: Callable[[int], RankPool], program: Program, tmp_path: Path
) -> None:
    ranks(program.num_ranks).run(run, program, str(tmp_path))


def complaint(program: Program, folder: str) -> str:
    try:
        run(program, folder)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_model_that_computes_or_trains_something_else_is_noticed(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """The control of the comparisons above."""
    faults = {
        "model.layers[1].register_forward_hook(lambda module, args, output: output * 1.01)": "not close",
        "optimizer = dmuon.Muon(model, lr=0.0, adamw_lr=1e-2)": "moved, or did not",
    }
    for fault, expected in faults.items():
        source = f"dmuon.dedicate_params(model, mesh)\nfully_shard(model, mesh=mesh)\n{fault}"
        for answer in ranks(2).run(complaint, Program("fault", 2, "transformer", blocks=[(0, source)]), str(tmp_path)):
            assert expected in answer, fault


def test_a_block_that_says_nothing_of_how_it_runs_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for before, language in (("", "python"), ("<!-- run: continue -->\n", "python"), ("", "text")):
        page.write_text(f"{before}```{language}\nprint()\n```\n")
        with pytest.raises(AssertionError, match=r"page\.md:"):
            list(programs_of(page))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{target}#{anchor}"
    assert page.name == "README.md" or f"]({page.name})" in (page.parent / "README.md").read_text(), "not in the index"


def raised_texts() -> set[str]:
    """Every text in a `raise` of dmuon, with … for what is put in when it runs."""
    texts = set()
    for path in (ROOT / "dmuon").rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if not isinstance(statement, ast.Raise):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    texts.add("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
    return texts


def test_troubleshooting_quotes_what_dmuon_raises() -> None:
    texts, page = raised_texts(), (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    tables = page.partition("## Setting up")[2].partition("## Symptoms without a text")[0]
    quotes = re.findall(r"^\| `([^`]+)`", tables, re.MULTILINE)
    assert len(quotes) > 20
    for quote in quotes:
        assert any(quote in text for text in texts), f"dmuon raises nothing like: {quote}"
