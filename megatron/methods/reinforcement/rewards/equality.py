"""Tests whether two formulas are equal, by evaluating both at several points.

Values are compared as rational numbers if possible, else with 50 digits. Answers cannot predict the points.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from hashlib import sha256
from operator import add, mul, sub, truediv
from typing import Any

from megatron.methods.reinforcement.rewards.formulas import Formula

_BITS = 20_000  # limit for numbers in a calculation, so that 9^9^9 is not calculated
_PLACES = 5
_DIGITS = 50
_ARGUMENT = 5000  # limit for the argument of exp and the logarithm of a power; larger values take long
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {"+": add, "-": sub, "*": mul, "/": truediv}
_INVERSES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}


class NotRational(ValueError):
    """Raised if a formula has names without a value, or its value is not a rational number."""


class Undefined(ArithmeticError):
    """Raised if a formula has no value, as 1/0, or a value too large to compute."""


def equal(formula: Formula, other_formula: Formula) -> bool | None:
    """Returns whether two formulas are equal, tested at several points; None if neither has a value at any
    point.

    A point gives each name a number. If only one formula has a value at a point, the result is False.
    """
    names = sorted(formula.names() | other_formula.names())
    compared = False
    for place in range(_PLACES if names else 1):
        values = {name: _coordinate(name, place) for name in names}
        is_equal = _equal_at(formula, other_formula, values)
        if is_equal is False:
            return False
        compared = compared or is_equal is True
    return True if compared else None


def rational(formula: Formula, values: Mapping[str, Fraction]) -> Fraction:
    """Returns the exact value of a formula as a fraction. values: the number for each name.

    Raises NotRational if the value is not rational, and Undefined for a division by 0 or a number that is too
    large.
    """
    if formula.operation == "number":
        return formula.number
    if formula.operation == "name":
        if formula.name not in values:
            raise NotRational(formula.name)
        return values[formula.name]
    if len(formula.parts) != 2:
        raise NotRational(formula.operation)
    left, right = (rational(part, values) for part in formula.parts)
    if formula.operation == "/" and right == 0:
        raise Undefined("division by 0")
    if formula.operation == "^":
        return _bounded(_power(left, right))
    return _bounded(_ARITHMETIC[formula.operation](left, right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotRational("the exponent is not an integer")
    if base == 0 and exponent < 0:
        raise Undefined("division by 0")
    if base in (0, 1):
        return base if exponent else Fraction(1)
    if base == -1:
        return Fraction(1 - 2 * (exponent.numerator % 2))
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > _BITS:
        raise Undefined("too large")
    return base**exponent.numerator


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > 2 * _BITS:
        raise Undefined("too large")
    return value


def _coordinate(name: str, place: int) -> Fraction:
    """Returns the value of a name at the point number `place`: fixed, pseudo-random, between -4 and 4."""
    hashed = int.from_bytes(sha256(f"{name} {place}".encode()).digest()[:6])
    return Fraction(hashed % 800_000 - 400_000, 100_003)


def _equal_at(formula: Formula, other_formula: Formula, values: Mapping[str, Fraction]) -> bool | None:
    with suppress(NotRational, Undefined):  # perhaps only one of the two has no value: _value finds out
        return rational(formula, values) == rational(other_formula, values)
    left, right = _value(formula, values), _value(other_formula, values)
    if left is None or right is None:
        return None if left is right else False
    difference = abs(left - right)
    return bool(difference <= max(abs(left), abs(right)) * 10.0**-30 or difference <= 10.0**-40)


def _value(formula: Formula, values: Mapping[str, Fraction]) -> Any:
    """Returns a formula's value with 50 digits, complex if necessary; None if it has no value."""
    import mpmath  # installed with torch; only this verifier needs it

    with mpmath.workdps(_DIGITS):
        try:
            return _calculated(formula, values, mpmath.mp)
        except (Undefined, ZeroDivisionError, ValueError, OverflowError):
            return None


def _calculated(formula: Formula, values: Mapping[str, Fraction], mp: Any) -> Any:
    if formula.operation in ("number", "name"):
        if formula.name in ("pi", "e") and formula.name not in values:
            return +getattr(mp, formula.name)
        exact = formula.number if formula.operation == "number" else values[formula.name]
        return mp.mpf(exact.numerator) / exact.denominator
    parts = [_calculated(part, values, mp) for part in formula.parts]
    result = _operated(formula.operation, parts, mp)
    if not mp.isfinite(result) or mp.mag(result) > _BITS:
        raise Undefined("too large")
    return result


def _operated(operation: str, parts: list[Any], mp: Any) -> Any:
    if operation in _ARITHMETIC:
        return _ARITHMETIC[operation](*parts)
    if operation == "abs":
        return abs(parts[0])
    if operation == "^" and parts[0] == 0:
        return mp.mpf(0) ** parts[1]
    grows = parts[1] * mp.log(parts[0]) if operation == "^" else parts[0]
    if operation in ("^", "exp", "sin", "cos", "tan", "sinh", "cosh", "tanh") and abs(grows) > _ARGUMENT:
        raise Undefined("too large")
    return mp.power(*parts) if operation == "^" else getattr(mp, _INVERSES.get(operation, operation))(parts[0])
