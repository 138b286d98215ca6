"""What a process knows about itself: shared state (`storage`), how it joins the others (`rendezvous`), and what each
way of cooperating can do (`traits`)."""
