"""Machine code from a record: straight from Inductor, by torch.compile where that fails, and nothing left behind."""

from __future__ import annotations

import logging
import shutil

import gpytorch
import pytest
import torch
from torch._inductor import config, cpu_vec_isa
from torch.fx.experimental.proxy_tensor import make_fx

import tighter_gp
from tests.test_compiled import make
from tests.test_device import Softmax
from tighter_gp.inductor import compile_recorded
from tighter_gp.training import NaturalGradients
from tighter_gp.training.natural_compiled import CompiledNaturalStep

X = torch.tensor([[2.0, 0.5], [0.5, 3.0]])

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="no C++ compiler for Inductor"
)


def record():
    """With an operation that Inductor calls by way of Python, and says so."""
    return make_fx(lambda x: [torch.linalg.solve_triangular(x.tril(), x.exp(), upper=False), x.sum()])(X)


def refuse(*args, **kwargs):
    raise RuntimeError("not here")


@needs_compiler
def test_a_record_goes_to_inductor_itself_in_silence(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", refuse)
    with caplog.at_level(logging.WARNING):
        compiled = compile_recorded(record(), [X], {})
    assert not caplog.records
    torch.testing.assert_close(list(compiled(X + 1)), list(record()(X + 1)))


@needs_compiler
def test_a_natural_step_has_the_numbers_of_the_eager_one(monkeypatch):
    monkeypatch.setattr(torch, "compile", refuse)
    runs = []
    for is_compiled in (True, False):
        mll, x, y = make(dtype=torch.float32)
        natural = NaturalGradients(mll.model, num_data=100)
        inside = {id(parameter) for parameter in natural.parameters}
        rest = [parameter for parameter in mll.parameters() if id(parameter) not in inside]
        step = CompiledNaturalStep(mll, natural)
        for _ in range(3):
            if is_compiled:
                loss, gradients = step(x, y), [parameter.grad for parameter in rest]
                assert step.is_compiled
            else:
                evaluate = lambda mll=mll, x=x, y=y: -mll(mll.model(x), y)
                targets = natural.gaussian_targets(mll, y)
                loss, gradients, _ = natural.train_step(evaluate, rest, 0.1, targets)
        (entry,) = natural.entries
        runs.append([loss.detach(), *gradients, *entry.current()])
    torch.testing.assert_close(*runs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("way", ["fails", "is not there"])
def test_torch_compile_takes_over(monkeypatch, way):
    if way == "fails":
        monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    else:
        monkeypatch.delattr(torch._inductor, "standalone_compile")
    asked = []
    monkeypatch.setattr(torch, "compile", lambda graph, **options: asked.append(options) or graph)
    compiled = compile_recorded(record(), [X], {})
    assert asked == [{"fullgraph": True, "dynamic": False}]
    torch.testing.assert_close(list(compiled(X)), list(record()(X)))


def test_options_are_those_of_torch_compile(monkeypatch):
    monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    asked = []
    monkeypatch.setattr(torch, "compile", lambda graph, **options: asked.append(options) or graph)
    compile_recorded(record(), [X], {"backend": "eager", "dynamic": True})
    assert asked == [{"fullgraph": True, "dynamic": True, "backend": "eager"}]


def test_what_no_way_compiles_is_a_warning_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    monkeypatch.setattr(torch, "compile", refuse)
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll)
    with pytest.warns(RuntimeWarning, match="The step is not compiled: not here"):
        step(x, y)
    assert not step.is_compiled


def test_what_was_believed_of_the_processor_is_forgotten(monkeypatch):
    def believe(graph, inputs, options, **kwargs):
        with config.patch(options["config_patches"]):
            cpu_vec_isa.valid_vec_isa_list()
        assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
        return graph

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    monkeypatch.setattr(torch._inductor, "standalone_compile", believe)
    compile_recorded(record(), [X], {})
    assert not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize


def test_every_tensor_has_the_layout_of_the_record():
    """Inductor's code reads memory without a look at strides."""
    seen = []

    def watched(graph, inputs):
        def run(*args):
            seen.extend(argument.is_contiguous() for argument in args)
            return graph.forward(*args)

        return run

    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, backend=watched)
    step(x, y)
    strided = x.mT.contiguous().mT
    assert not strided.is_contiguous()
    torch.testing.assert_close(step(strided, y), step(x, y), rtol=0, atol=0)
    assert all(seen)
    assert len(step._graphs) == 1


def test_another_number_of_threads_makes_another_graph():
    mll, x, y = make()
    step, before = tighter_gp.CompiledStep(mll, backend="eager"), torch.get_num_threads()
    step(x, y)
    try:
        torch.set_num_threads(before + 1)
        step(x, y)
    finally:
        torch.set_num_threads(before)
    step(x, y)
    assert len(step._graphs) == 2


@needs_compiler
def test_a_sampled_objective_draws_the_numbers_of_its_seed():
    torch.manual_seed(0)
    mll = tighter_gp.TighterELBO(gpytorch.likelihoods.SoftmaxLikelihood(3, 3), Softmax().train(), num_data=100)
    x, y = torch.randn(7, 3), torch.arange(7) % 3
    step = tighter_gp.CompiledStep(mll)
    losses = []
    for seed in (1, 1, 2):
        step(x, y)
        torch.manual_seed(seed)
        losses.append(step(x, y).item())
    assert step.is_compiled
    assert losses[0] == losses[1] != losses[2]
