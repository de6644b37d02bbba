"""``python -m benchmarks recipes``: whether the default recipe holds its own."""

from __future__ import annotations

import json

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks import readme, recipes


def recipe_lines(**nlpd):
    names = {"default": "default", "small": "adam .01", "natural": "natural .1"}
    return [
        {
            "dataset": "wine",
            "num_inducing": 8,
            "config": {},
            "split": split,
            "seed": 0,
            "method": names[name],
            "nlpd": value,
            "processor_seconds": 3.0 if name == "small" else 2.0,
        }
        for name, values in nlpd.items()
        for split, value in enumerate(values)
    ]


def test_the_default_recipe_is_compared_split_by_split():
    text = recipes.differences(recipe_lines(default=(1.0, 2.0, 3.0), small=(1.1, 2.1, 3.1), natural=(0.5, 1.5, 2.5)))
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]]
    assert cells == [
        "wine",
        "8",
        "3",
        "2.0000 ± 0.5774",
        "-0.1000 ± 0.0000",
        "",
        "",
        "+0.5000 ± 0.0000",
        "no",
        "1.00 to 1.50",
    ]


@pytest.mark.parametrize(
    ("others", "holds"),
    [
        ((0.995, 1.995), "yes"),  # worse by less than the slack
        ((0.98, 1.98), "no"),
        ((0.9, 2.06), "yes"),  # worse by .02 ± .08
    ],
)
def test_it_holds_its_own_within_the_slack_or_two_standard_errors(others, holds):
    text = recipes.differences(recipe_lines(default=(1.0, 2.0), small=others))
    assert text.splitlines()[2].split("|")[-3].strip() == holds


def test_the_page_on_speed_has_the_recipes_where_there_are_lines():
    assert readme.recipe_differences([]) == ""
    text = readme.recipe_differences(recipe_lines(default=(1.0,), small=(1.1,)))
    assert text.startswith("## Recipes after the same time")
    assert "-0.1000" in text


def test_smoke_compares_all_recipes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "EXPERIMENTS", ("recipes",))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        assert command_line.main(["recipes", "--smoke", "--splits", "0", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_default_dtype(before)
    made = [json.loads(line) for line in (tmp_path / "smoke" / "recipes.jsonl").read_text().splitlines()]
    assert [one["method"] for one in made] == list(recipes.METHODS)
    assert all(one["steps"] > 0 and one["processor_seconds"] > 0 for one in made)
    assert "holds its own" in capsys.readouterr().out
