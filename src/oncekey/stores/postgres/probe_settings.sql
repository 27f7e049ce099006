-- What decides whether a commit survives. reset_val: as the server, the database and the role have it; our own
-- connections turn synchronous_commit on where it is off.
SELECT name, reset_val FROM pg_settings
WHERE name IN ('synchronous_commit', 'fsync', 'full_page_writes')
UNION ALL
SELECT 'standby', pg_is_in_recovery()::text
