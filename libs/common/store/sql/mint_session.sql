-- A machine token's user and a new session epoch (rule 14), in one statement. No row: the token is not valid.
with t as (
  select token_id, user_id from machine_tokens
  where revoked_at is null
    and (hash = %(hash)s and (expires_at is null or expires_at > now())
         or previous_hash = %(hash)s and previous_expires_at > now())
)
insert into session_epochs as e (user_id, epoch)
select user_id, floor(extract(epoch from clock_timestamp()) * 1000)::bigint from t
on conflict (user_id) do update set epoch = greatest(e.epoch + 1, excluded.epoch)
returning e.user_id, e.epoch, (select token_id::text from t) as token_id
