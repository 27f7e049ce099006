-- One batch; the trigger in batch.sql does the work.
INSERT INTO temp.oncekey_batch (ends, begins, bytes, now) VALUES (?, ?, ?, ?)
