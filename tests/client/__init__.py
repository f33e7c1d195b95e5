"""The application's side: keys, signatures, tasks, enqueue, results, kills, against a real store."""
