"""Commands and tasks that no run needs: the core names their modules, and imports none of them."""
