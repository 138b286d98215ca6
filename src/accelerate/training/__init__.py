"""The functions behind the Accelerator facade; each takes the Accelerator first."""
