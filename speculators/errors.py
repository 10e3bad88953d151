"""Errors meant for people: each message names what is wrong and what would be right."""


class PipelineError(Exception):
    """Base of every error that a user can act on.

    The message names the file, field or value at fault and says what to do. The command and the flow print it
    without a traceback; anything else that escapes is a defect of this project.
    """


class ConfigError(PipelineError):
    """A configuration file, field or combination of fields that cannot work."""


class DataError(PipelineError):
    """Prompts, conversations or datasets that cannot be used."""


class StoreError(PipelineError):
    """The store cannot be reached, read or written, or holds something damaged.

    Attributes:
        is_transient: Whether another try may work: the store did not answer, or asked to slow down.
    """

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


class ServingError(PipelineError):
    """vLLM failed to start, died, or answered something unusable."""


class TrainingError(PipelineError):
    """Training could not start or go on."""


class CheckpointError(PipelineError):
    """A verifier's or drafter's checkpoint that does not have what it should."""


class MissingStageError(PipelineError):
    """A stage was asked to run before the stage that it reads from has finished."""
