"""The shortest script that a launcher can start: it prints its state."""

import torch


def main() -> None:
    """Print how many devices there are."""
    if torch.cuda.is_available():
        print(f"Successfully ran on {torch.cuda.device_count()} GPUs")
    else:
        print("Successfully ran on CPU")


if __name__ == "__main__":
    main()
