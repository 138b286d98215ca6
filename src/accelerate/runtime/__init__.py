"""The shared state of a process (`storage`), and the way it joins the others (`rendezvous`)."""
