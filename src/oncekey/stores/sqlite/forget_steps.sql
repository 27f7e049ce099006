-- What a key that goes, expires or starts over has done before no longer counts.
DELETE FROM idempotency_steps WHERE scope = ? AND key = ?
