-- Machine time that tenants have used.
-- ARGV: (tenant, virtual seconds) of each.
for i = 1, #ARGV, 2 do charge(ARGV[i], tonumber(ARGV[i + 1])) end
return 1
