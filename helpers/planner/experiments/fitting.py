"""The fit of the planner's factors to steps that were measured or published, and the interval that follows from it."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TypeVar

import numpy as np
from scipy.optimize import least_squares

from helpers.planner.corrections import Corrections
from helpers.planner.step_time import COVERAGE, Constants

Factors = TypeVar("Factors", Constants, Corrections)


def fit_factors(
    prior: Factors, width: Factors, noise: float, log_errors: Callable[[Factors], Sequence[float]]
) -> Factors:
    """Find the factors that predict known steps best and do not go far from ``prior``. It is deterministic.

    Two things are made small by least squares: log(predicted / known) of each step, in units of ``noise``, and the
    distance of each factor's logarithm from that of ``prior``, in units of ``width``. With logarithms a prediction that
    is 1.1 times too long is as bad as one that is 1.1 times too short, and the factors stay positive.

    log_errors: called with factors to try, it gives log(predicted / known) of each step.
    """
    factors_class = type(prior)
    log_prior = np.log(astuple(prior))
    log_width = np.array(astuple(width))

    def residuals(log_factors: np.ndarray) -> np.ndarray:
        """What least_squares makes small: the error of each step, then each factor's distance from ``prior``."""
        factors = factors_class(*np.exp(log_factors))
        errors = np.array(log_errors(factors)) / noise
        # The pseudo-Huber loss: beyond the noise an error counts by its size and not by its square, so that a few
        # outliers do not decide the fit. least_squares squares what is returned, so this is the root of the loss.
        loss = 2 * (np.sqrt(1 + errors**2) - 1)
        robust_errors = np.sign(errors) * np.sqrt(loss)
        distances_from_prior = (log_factors - log_prior) / log_width
        return np.concatenate([robust_errors, distances_from_prior])

    # The tolerances are so small that the result depends only on the steps, and not on where the search stops.
    solution = least_squares(residuals, log_prior, xtol=1e-12, ftol=1e-14)
    return factors_class(*np.exp(solution.x).tolist())


def factor_of_most(logs: Sequence[float]) -> float:
    """The factor by which COVERAGE of the predictions are off at most. logs: log(predicted / known) of each."""
    return float(np.exp(np.quantile(np.abs(logs), COVERAGE)))
