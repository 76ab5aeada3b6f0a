"""How busy an engine is, as a front-end worker sees it."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)  # frozen takes three times as long to make
class EngineLoad:
    """One engine, at one moment. index: from 0. free_slots: requests that this worker could submit there now. waiting_tokens:
    about those of prompts that wait there; running: requests that have pages; both of all front ends, as the engine published
    them last. free_pages: that are free, or cached and nobody's. tokens_in_flight: prompts and max_tokens of the requests that
    this worker has there now. unseen_tokens: of prompts that it sent there since the engine has accepted any, so that nothing
    published counts them. accepts: whether a request may be sent there at all."""

    index: int
    free_slots: int
    waiting_tokens: int
    running: int
    free_pages: int
    tokens_in_flight: int
    unseen_tokens: int
    accepts: bool
