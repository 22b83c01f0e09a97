"""Errors, sorted by what the caller must do: try again, give up, or stop quietly."""


class TowlineError(Exception):
    """Base of all errors of ours."""


class Retryable(TowlineError):
    """The same call may work later."""


class Permanent(TowlineError):
    """The same call never will."""


class OtherMigrations(Permanent):
    """The database was migrated by other files than ours."""


class NotOwner(TowlineError):
    """Someone else has it now: stop quietly, this is no incident."""


class StoreUnavailable(Retryable):
    """Redis or Postgres did not answer, or refused the write. The write may have happened: repeat it safely or read."""
