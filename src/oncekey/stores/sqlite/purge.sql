-- Delete one row that doomed_keys.sql or doomed_tombstones.sql has just listed, in the same transaction.
DELETE FROM idempotency_keys WHERE rowid = ?
