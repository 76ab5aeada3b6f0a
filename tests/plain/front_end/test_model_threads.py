"""Models of bodies may be used first by several threads at one moment: `make attack` found a crash of msgspec."""

import subprocess
import sys

ROUNDS, THREADS = 40, 6
SCRIPT = f"""
import sys, threading
import msgspec
from blinkpy.dpu.http.fields.request_body import read

sys.setswitchinterval(1e-6)
SOURCE = '''
class Leaf(msgspec.Struct):
    names: "list[str] | None" = None
    inner: "Leaf | None" = None

class Branch(msgspec.Struct, tag="branch"):
    leaf: "Leaf | None" = None
    leaves: "list[Leaf]" = []

class Tree(msgspec.Struct):
    branch: "Branch | None" = None
    trees: "list[Tree]" = []
'''
CONTENT = {{"branch": {{"type": "branch", "leaf": {{"names": ["a"]}}}}, "trees": [{{"trees": []}}]}}
wrong = []
for number in range({ROUNDS}):
    module = type(sys)(f"models_{{number}}")
    module.msgspec = msgspec
    sys.modules[module.__name__] = module
    exec(SOURCE, vars(module))
    start = threading.Barrier({THREADS})

    def run():
        start.wait()
        for _ in range(20):
            if read(CONTENT, module.Tree).branch.leaf.names != ["a"]:
                wrong.append(number)

    threads = [threading.Thread(target=run) for _ in range({THREADS})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("wrong:", wrong)
"""


def test_threads_that_use_a_new_model_together() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "wrong: []\n"), run.stderr[-2000:]
