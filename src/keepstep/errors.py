"""The errors keepstep raises on purpose: a small drawn tree.

    KeepstepError
    +-- ConfigError        what was asked for cannot be: unknown key, bad value, contradiction
    +-- MemoryBudgetError  the slots do not fit; names the numbers and the fix
    +-- IdentityError      bytes that belong to somebody else: another job, user, rank or world size
    +-- LayoutError        the state has another shape than the bytes: names the first differences
    |   +-- UntrustedError the bytes name types or calls that the live program's state has not
    +-- DamageError        bytes that fail their checksum: names the file, block, expected and found
    +-- KeeperError        the keeper could not be started or reached
    +-- StoreError         the store could not be read or written
    |   +-- UnsavedError   a training's last step is not in the store, and was to be
    +-- MeetingError       the nodes could not meet, or the place where they met is gone
    +-- CorruptionError    this rank's state is not what other ranks have, and was to be the same
    |   +-- StoppedError   likewise, and a person is to decide
    +-- WrongNumbersError  a step's numbers are wrong, come again, and are not to be trained on
    |   +-- DeviceError    this rank's hardware computes wrong whenever it is asked
    +-- PeerLost           another rank is lost, and this process cannot go on without a restart

Every message names what was expected and what was found, and ends with its code when it is shown:
`keepstep help KS1002` says what is behind it. Our own mistakes assert instead.
"""

from __future__ import annotations

from keepstep.codes import Code, of_error


class KeepstepError(Exception):
    """Any error keepstep raises on purpose."""

    @property
    def code(self) -> Code | None:
        """What stands for this message in `keepstep help` and the documentation."""
        return of_error([kind.__name__ for kind in type(self).__mro__], super().__str__())

    def __str__(self) -> str:
        message = super().__str__()
        code = self.code
        if code is None or "[KS" in message:  # it tells of another error, which has its own
            return message
        return f"{message} [{code.number}]"


class ConfigError(KeepstepError):
    """A configuration that cannot be: unknown key, bad value, contradiction."""


class MemoryBudgetError(KeepstepError):
    """The slots do not fit into the memory that is free."""


class IdentityError(KeepstepError):
    """Bytes that belong to another job, user, rank or world size."""


class LayoutError(KeepstepError):
    """The live state and the saved state have different shapes."""


class UntrustedError(LayoutError):
    """The saved state names what neither keepstep nor the live program knows: it is not made."""


class DamageError(KeepstepError):
    """Bytes that fail their checksum."""


class KeeperError(KeepstepError):
    """The keeper could not be started or reached."""


class StoreError(KeepstepError):
    """The store could not be read or written."""


class UnsavedError(StoreError):
    """The last step of a training is not in the store. Its memory is kept as after any failure."""


class MeetingError(KeepstepError):
    """The nodes could not meet, or the place where they met is gone."""


class CorruptionError(KeepstepError):
    """This rank's state, or what it computed, is wrong. Its process ends, so that all go back."""


class StoppedError(CorruptionError):
    """The same, where a person is to decide how to go on. The job ends, and its memory is kept."""


class WrongNumbersError(KeepstepError):
    """A step's numbers are wrong whenever it is run, and it is not to be trained on. The memory is
    of before that step."""


class DeviceError(WrongNumbersError):
    """This rank's hardware computes wrong numbers where others compute right ones."""


class PeerLost(KeepstepError):
    """Another rank is lost. Inside `with step:` it ends the step's body; elsewhere the process."""
