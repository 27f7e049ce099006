-- The first statement of an enlisted transaction: a write, so that the file's write lock is ours or we hear of it now.
UPDATE idempotency_keys SET owner = owner
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'
