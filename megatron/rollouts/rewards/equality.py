"""When two formulas are equal: as rational numbers, else in 50 digits, at places that texts cannot know."""

from collections.abc import Mapping
from fractions import Fraction
from hashlib import sha256
from typing import Any

from megatron.rollouts.rewards.formulas import Formula

_BITS = 20_000  # of the numbers in a calculation: 9^9^9 is not calculated
_PLACES = 5
_DIGITS = 50
_ARGUMENT = 5000  # of exp, and of a power's logarithm: larger values mean nothing here and take long
_INVERSES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}


class NotRational(ValueError):
    """A formula whose value is no rational number, or has names."""


class Undefined(ArithmeticError):
    """A formula that has no value, or a larger one than is calculated."""


def equal(one: Formula, other: Formula) -> bool | None:
    """Whether both have the same value wherever their names are given the same ones; None where no value was
    found. Where only one of them has a value, they are not equal."""
    names = sorted(one.names() | other.names())
    compared = False
    for place in range(_PLACES if names else 1):
        values = {name: _coordinate(name, place) for name in names}
        same = _equal_at(one, other, values)
        if same is False:
            return False
        compared = compared or same is True
    return True if compared else None


def rational(formula: Formula, values: Mapping[str, Fraction]) -> Fraction:
    """Its exact value, with these values for names. Raises NotRational, and Undefined for a division by 0 or
    what is too large."""
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
    operations = {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}
    return _bounded(operations[formula.operation](right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotRational("a root")
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
    """The value of a name at one of the places, between -4 and 4 and of a large denominator."""
    drawn = int.from_bytes(sha256(f"{name} {place}".encode()).digest()[:6])
    return Fraction(drawn % 800_000 - 400_000, 100_003)


def _equal_at(one: Formula, other: Formula, values: Mapping[str, Fraction]) -> bool | None:
    try:
        return rational(one, values) == rational(other, values)
    except (NotRational, Undefined):
        pass  # of one of them alone, perhaps: found below
    left, right = _value(one, values), _value(other, values)
    if left is None or right is None:
        return None if left is right else False
    difference = abs(left - right)
    return bool(difference <= max(abs(left), abs(right)) * 10.0**-30 or difference <= 10.0**-40)


def _value(formula: Formula, values: Mapping[str, Fraction]) -> Any:
    """In 50 digits, a complex number where it has to be; None where it has none."""
    import mpmath  # a dependency of torch's, needed by this verifier alone

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
    if operation == "+":
        return parts[0] + parts[1]
    if operation == "-":
        return parts[0] - parts[1]
    if operation == "*":
        return parts[0] * parts[1]
    if operation == "/":
        return parts[0] / parts[1]
    if operation == "abs":
        return abs(parts[0])
    if operation == "^" and parts[0] == 0:
        return mp.mpf(0) ** parts[1]
    grows = parts[1] * mp.log(parts[0]) if operation == "^" else parts[0]
    if operation in ("^", "exp", "sin", "cos", "tan", "sinh", "cosh", "tanh") and abs(grows) > _ARGUMENT:
        raise Undefined("too large")
    return mp.power(*parts) if operation == "^" else getattr(mp, _INVERSES.get(operation, operation))(parts[0])
