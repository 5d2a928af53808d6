"""What is compared and measured before the first step: hosts, versions, code, placement of groups, links."""
