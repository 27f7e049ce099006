-- Delete the steps of a key that is deleted, expires or starts over.
DELETE FROM idempotency_steps WHERE scope = ? AND key = ?
