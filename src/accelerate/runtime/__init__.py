"""What a process knows about itself: shared state (`storage`), and how it joins the others (`rendezvous`)."""
