"""Functions that the launchers of functions start, and a command line that starts some: NAME,NAME [KEYWORDS]."""

import ast
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from harness import everywhere, learn

from accelerate import Accelerator, PartialState, notebook_launcher


def note(**what: object) -> None:
    Path(f"{os.environ['NOTES']}/{os.environ.get('RANK', 'home')}-{os.getpid()}.json").write_text(json.dumps(what))


def total(**also: object) -> None:
    state = PartialState()
    summed = torch.ones(1) * (state.process_index + 1)
    torch.distributed.all_reduce(summed)
    note(
        size=state.num_processes,
        local=state.local_process_index,
        total=int(summed),
        forked=state.fork_launched,
        precision=os.environ["ACCELERATE_MIXED_PRECISION"],
        **also,
    )


def train() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 1))
    loader = torch.utils.data.DataLoader(torch.randn(32, 200), batch_size=8, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        loss = learn(accelerator, model(batch).square().mean(), optimizer)
    note(loss=everywhere(loss))


def train_in_a_used_process() -> None:
    """Use the threads of every library here first, then train in forked processes."""
    torch.set_num_threads(4)
    left = torch.randn(600, 600, requires_grad=True)
    (left @ left).sum().backward()
    torch.linalg.svd(left.detach())
    torch.nn.functional.conv2d(torch.randn(8, 3, 64, 64), torch.randn(8, 3, 3, 3))
    notebook_launcher(train, num_processes=2)


def meet_on_others() -> bool:
    """Meet the others, and once more on each rank but 1, which returns True."""
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index != 1:
        state.wait_for_everyone()
    return state.process_index == 1


def fail_on_one() -> None:
    if meet_on_others():
        raise KeyError("what went wrong")


def vanish_on_one() -> None:
    if meet_on_others():
        os.kill(os.getpid(), signal.SIGKILL)


def slip_away() -> None:
    if os.environ["RANK"] == "1":
        os._exit(0)


def return_on_one() -> None:
    meet_on_others()


def fail_at_first() -> None:
    state = PartialState()
    state.wait_for_everyone()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0:
        raise ValueError("only the first attempt")
    total(attempt=attempt)


def wait_in_python() -> None:
    print(f"up {os.getpid()}\n", end="", flush=True)
    time.sleep(600)


def wait_in_torch() -> None:
    """Wait where Python's handlers of signals do not run."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"up {os.getpid()}\n", end="", flush=True)
    store.get("never")


def wait_and_ignore() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print(f"up {os.getpid()}\n", end="", flush=True)
    time.sleep(600)


def main() -> None:
    """Start what the command line says: functions, one after the other, and the keywords of `notebook_launcher`."""
    names, keywords = sys.argv[1].split(","), ast.literal_eval(sys.argv[2]) if len(sys.argv) > 2 else None
    for name in names:
        if keywords is None:
            globals()[name]()
            continue
        print("==", name, flush=True)
        try:
            notebook_launcher(globals()[name], **{"num_processes": 2, **keywords})
        except KeyboardInterrupt:
            print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            if name == names[-1]:
                raise SystemExit(1) from None


if __name__ == "__main__":
    main()
