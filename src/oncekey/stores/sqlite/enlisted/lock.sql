-- The first statement of an enlisted transaction: a write, so that it takes the file's write lock now, or fails now.
UPDATE idempotency_keys SET owner = owner
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'
