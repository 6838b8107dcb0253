"""One model run by several processes: the first rank is a worker whose engine has followers, which obey."""
