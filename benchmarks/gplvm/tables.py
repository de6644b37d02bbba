"""Tables of the comparison, beside those of all experiments."""

from __future__ import annotations

from ..report import Mean, Result, grouped, mean, pairs, table


def latents_table(results: list[Result]) -> str:
    """What the other tables do not show, run by run."""
    header = [
        "data",
        "M",
        "seed",
        "method",
        "-bound / N",
        "raw units",
        "1-NN accuracy",
        "RMSE / column mean's",
        "relevance",
    ]
    rows = [
        [
            result["dataset"],
            str(result["num_inducing"]),
            str(result["seed"]),
            result["method"],
            Mean(-result["bound"], own_error(result), 1).show(3),
            f"{-result['bound_raw']:.3f}",
            f"{1 - result['error']:.3f}",
            f"{result['rmse'] / result['rmse_column_mean']:.3f}",
            " ".join(f"{value:.2f}" for value in result["relevance"][:5]),
        ]
        for result in results
    ]
    return table(header, rows)


def own_error(result: Result) -> float | None:
    """Standard error of the bound that a run was trained with, from the draws of x; None for a collapsed bound."""
    name = "bound_tighter_se" if result["method"].startswith("t") else "bound_base_se"
    return result.get(name)


def judged_table(results: list[Result]) -> str | None:
    """What the comparison is judged by, tighter against base; None if there are no pairs."""
    header = [
        "data",
        "M",
        "pair",
        "lower -bound",
        "least 1-NN accuracy",
        "largest RMSE / column mean's",
        "Δ RMSE",
        "Δ NLPD",
        "RMSE worse by > 1 s.e.",
    ]
    rows = []
    for (dataset, num_inducing, _), group in grouped(results).items():
        for (base, tighter), matched in pairs(group).items():
            both = [result for pair in matched for result in pair]
            wins = sum(second["bound"] > first["bound"] for first, second in matched)
            rmse, nlpd = (mean(second[name] - first[name] for first, second in matched) for name in ("rmse", "nlpd"))
            assert rmse is not None
            assert nlpd is not None
            rows.append(
                [
                    dataset,
                    str(num_inducing),
                    f"{tighter} − {base}",
                    f"{wins} of {len(matched)}",
                    f"{1 - max(result['error'] for result in both):.3f}",
                    f"{max(result['rmse'] / result['rmse_column_mean'] for result in both):.3f}",
                    rmse.show(4, signed=True),
                    nlpd.show(4, signed=True),
                    "" if rmse.error is None else "yes" if rmse.value > rmse.error else "no",
                ]
            )
    return table(header, rows) if rows else None
