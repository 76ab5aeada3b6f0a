"""Clients that send requests repeatedly, and check every answer: it must be whole, and equal that of an
undisturbed engine."""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

TIMEOUT_S = 120.0


class SteadyLoad:
    """answers: the answer to each number in an undisturbed run; set by learn(). asked, failures, longest_s: the counts."""

    def __init__(self, url: str, tokens: int = 40, kinds: int = 8):
        self.url, self.tokens, self.kinds = url, tokens, kinds
        self.answers: dict[int, str] = {}
        self.asked, self.failures, self.longest_s = 0, list[str](), 0.0
        self._lock, self._wanted = threading.Lock(), 0
        self._threads: list[threading.Thread] = []
        self._number = 0

    def learn(self) -> None:
        """Ask for each answer once."""
        answers = {number: self._ask(number) for number in range(self.kinds)}
        assert not any(problem for _, problem in answers.values()), answers
        self.answers = {number: text for number, (text, _) in answers.items()}
        assert len(set(self.answers.values())) == self.kinds, "answers that are alike show nothing"

    def set_clients(self, number: int) -> None:
        """As many clients ask from now on."""
        self._wanted = number
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for index in range(len(self._threads), number):
            thread = threading.Thread(target=self._run, args=(index,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """Wait for the last answers."""
        self._wanted = 0
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a client waits for ever"

    def _run(self, index: int) -> None:
        while index < self._wanted:
            with self._lock:
                number = self._number % self.kinds
                self._number += 1
            began = time.monotonic()
            try:
                text, problem = self._ask(number)
            except Exception as error:  # whatever it is: no client ends in silence
                text, problem = "", f"{type(error).__name__}: {error}"
            if not problem and text != self.answers[number]:
                problem = f"{text!r}, not {self.answers[number]!r}"
            with self._lock:
                self.asked += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                if problem:
                    self.failures.append(f"request {self.asked}: {problem}")

    def _ask(self, number: int) -> tuple[str, str]:
        """The text of an answer, streamed for even numbers, and its error."""
        body = {"model": "demo", "prompt": f"Story {number}:", "max_tokens": self.tokens, "seed": number, "ignore_eos": True}
        events: Sequence[dict[str, Any]]
        with httpx.Client(timeout=TIMEOUT_S) as client:
            if number % 2:
                answer = client.post(f"{self.url}/v1/completions", json=body)
                if answer.status_code != 200:
                    return "", f"status {answer.status_code}: {answer.text}"
                events = [answer.json()]
            else:
                with client.stream("POST", f"{self.url}/v1/completions", json={**body, "stream": True}) as answer:
                    if answer.status_code != 200:
                        return "", f"status {answer.status_code}: {answer.read().decode()}"
                    lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
                if lines[-1:] != ["data: [DONE]"]:
                    return "", f"a stream without its end: {lines[-1:]}"
                events = [json.loads(line[6:]) for line in lines[:-1]]
        if errors := [event["error"] for event in events if "error" in event]:
            return "", f"an error: {errors[0]}"
        choices = [event["choices"][0] for event in events if event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        return text, "" if choices[-1]["finish_reason"] == "length" else f"finish_reason {choices[-1]['finish_reason']}"
