-- One row that doomed_keys.sql or doomed_tombstones.sql has just named, in the same transaction.
DELETE FROM idempotency_keys WHERE rowid = ?
