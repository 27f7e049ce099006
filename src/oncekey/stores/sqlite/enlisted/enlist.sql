-- Whether this attempt owns the key, under the write lock that lock.sql took. No row: it does not, or this is another
-- file.
SELECT NULL FROM idempotency_keys
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'
