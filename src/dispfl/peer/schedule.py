"""The hours of a site: when it trains and exchanges models, and what it tells others of them.

Outside of its hours a site sleeps. It neither trains nor requests models, and answers requests for
its own with how long it sleeps, so that no round waits for it. It goes on exchanging what members
must know: records, rosters and revocations.
"""

import datetime
import math
import re
import time
import zoneinfo
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import field_validator

from dispfl.core.staleness import Mode
from dispfl.errors import ConfigError
from dispfl.settings import Settings

_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d) *[-–] *([01]?\d|2[0-3]):([0-5]\d)")
DAY_MINUTES = 24 * 60
MAX_SLEEP = 3 * 86_400.0
"""The longest sleep in seconds that another site is believed: one night is left out at most, where
its hours do not exist because clocks are changed."""


class ScheduleSettings(Settings):
    """When a site trains and exchanges models; by default always."""

    table: ClassVar[str] = "schedule"

    mode: Mode = "sync"
    """sync: in each round a site waits for the models of its neighbours. async: nobody waits, and a
    slow site takes fewer steps; a term of the whole federation. `schedule = "async"` for short."""
    hours: str | None = None
    """The hours of the day in which the site trains and exchanges models, such as "20:00-06:00". A
    training step that has begun is finished."""
    timezone: str | None = None
    """The time zone of `hours`, such as "Europe/Berlin"; by default that of the machine."""

    @field_validator("hours")
    @classmethod
    def _check_hours(cls, hours: str | None) -> str | None:
        if hours is None:
            return None
        match = _HOURS.fullmatch(hours.strip())
        if match is None or (match[1], match[2]) == (match[3], match[4]):
            raise ConfigError(
                f"schedule.hours is {hours!r}; give two different times of the day, such as"
                ' "20:00-06:00".',
                key="schedule.hours",
            )
        return hours

    @field_validator("timezone")
    @classmethod
    def _check_timezone(cls, timezone: str | None) -> str | None:
        try:
            if timezone is not None:
                zoneinfo.ZoneInfo(timezone)
        except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
            raise ConfigError(
                f"schedule.timezone is {timezone!r}, which this machine does not know; give a name"
                ' such as "Europe/Berlin".',
                key="schedule.timezone",
            ) from None
        return timezone

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a time zone without hours."""
        if self.timezone is not None and self.hours is None:
            raise ConfigError(
                f"schedule.timezone is {self.timezone!r} without schedule.hours; set hours, such as"
                ' "20:00-06:00", or omit it.',
                key="schedule.timezone",
            )

    def start(self, now: Callable[[], float] = time.time) -> "Schedule":
        """Return the schedule by a clock that shows seconds since 1970."""
        if self.hours is None:
            return Schedule(now=now)
        match = _HOURS.fullmatch(self.hours.strip())
        assert match is not None
        first_hour, first_minute, last_hour, last_minute = map(int, match.groups())
        opens = datetime.time(first_hour, first_minute)
        closes = datetime.time(last_hour, last_minute)
        zone = zoneinfo.ZoneInfo(self.timezone) if self.timezone else None
        return Schedule(DailyHours(opens, closes, zone), now)


@dataclass(frozen=True)
class DailyHours:
    """A part of every day, which may include midnight."""

    opens: datetime.time
    closes: datetime.time
    zone: datetime.tzinfo | None = None
    """None: the machine's."""

    def windows(self, now: float) -> list[tuple[float, float]]:
        """The windows around a time, each from its opening to its close, oldest first.

        A time that does not exist, because clocks are set forward, is the one that follows an hour
        later; where that leaves nothing of a window, there is none on that day.
        """
        today = datetime.datetime.fromtimestamp(now, self.zone).date()
        windows = []
        for days in (-2, -1, 0, 1, 2):
            first_day = today + datetime.timedelta(days=days)
            last_day = first_day
            if self.closes <= self.opens:
                last_day += datetime.timedelta(days=1)
            opening = datetime.datetime.combine(first_day, self.opens, self.zone).timestamp()
            close = datetime.datetime.combine(last_day, self.closes, self.zone).timestamp()
            if opening < close:
                windows.append((opening, close))
        return windows

    def in_utc(self, now: float) -> tuple[int, int]:
        """The minutes of the UTC day at which the next window opens and closes."""
        opening, close = next(window for window in self.windows(now) if now < window[1])
        return int(opening // 60) % DAY_MINUTES, int(close // 60) % DAY_MINUTES


@dataclass(frozen=True)
class Schedule:
    """When a site is awake, by its own clock."""

    hours: DailyHours | None = None
    """None: always."""
    now: Callable[[], float] = time.time

    def asleep_for(self) -> float:
        """Seconds until the site's hours begin; 0 within them."""
        now = self.now()
        wakes_at = self._wakes_at(now)
        return 0.0 if wakes_at is None else wakes_at - now

    def wakes_at(self) -> int | None:
        """When the site's hours begin, in seconds since 1970; None within them."""
        wakes_at = self._wakes_at(self.now())
        return None if wakes_at is None else round(wakes_at)

    def _wakes_at(self, now: float) -> float | None:
        if self.hours is None:
            return None
        opening = next(opening for opening, close in self.hours.windows(now) if now < close)
        return opening if opening > now else None

    def awake_for(self) -> float | None:
        """Seconds until the site's hours end; None if they never do."""
        if self.hours is None:
            return None
        now = self.now()
        close = next(close for _, close in self.hours.windows(now) if now < close)
        return close - now

    def announcement(self) -> dict[str, Any]:
        """What other sites are told: the hours in minutes of the UTC day, and the rest of a sleep.

        A rest needs no agreement about the time of day.
        """
        if self.hours is None:
            return {}
        told: dict[str, Any] = {"hours": list(self.hours.in_utc(self.now()))}
        seconds = self.asleep_for()
        if seconds > 0:
            told["asleep_for"] = round(seconds, 1)
        return told


def announced_sleep(announcement: Any) -> float:
    """Return how long a peer says that it sleeps, in seconds; 0 if it says nothing sensible."""
    if not isinstance(announcement, int | float) or isinstance(announcement, bool):
        return 0.0
    return announcement if 0 < announcement <= MAX_SLEEP else 0.0


def announced_hours(announcement: Any) -> list[int] | None:
    """Return the hours that a peer announces, in minutes of the UTC day; None if it has none."""
    if not isinstance(announcement, list) or len(announcement) != 2:
        return None
    for minute in announcement:
        if type(minute) is not int or not 0 <= minute < DAY_MINUTES:
            return None
    return announcement


def overlap(one: Sequence[int] | None, other: Sequence[int] | None) -> int:
    """Return the minutes of a day in which two sites are awake, by their announced hours."""
    return len(_minutes(one) & _minutes(other))


def _minutes(hours: Sequence[int] | None) -> set[int]:
    if hours is None:
        return set(range(DAY_MINUTES))
    opens, closes = hours
    length = (closes - opens) % DAY_MINUTES
    return {(opens + minute) % DAY_MINUTES for minute in range(length)}


def hours_text(hours: Sequence[int]) -> str:
    """`19:00-05:00`, of announced hours."""
    return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in hours)


def duration(seconds: float) -> str:
    """`9 h 30 min`, or `5 min`, rounded up."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
